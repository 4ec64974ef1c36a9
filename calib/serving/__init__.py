"""Inside a serving engine: whether it computes with the scales that the model's files hold."""
