"""Products with weight matrices."""
