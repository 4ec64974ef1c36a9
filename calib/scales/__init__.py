"""Statistics, and the scales derived from them."""
