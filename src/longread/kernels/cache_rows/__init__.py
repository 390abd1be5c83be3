"""The bytes of a cache row: FP8 values with power-of-two scales, rotated channels kept in bfloat16."""
