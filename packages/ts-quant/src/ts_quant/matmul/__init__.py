"""Products with a quantized weight that need no full-precision copy of it: tensor-core paths."""
