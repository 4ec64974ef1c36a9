"""The same model with other K and V: factors moved from one weight to another, and the proof."""
