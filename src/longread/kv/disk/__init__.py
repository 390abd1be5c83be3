"""The disk tier: records in segment files, an SQLite index over them, and documents."""
