"""What each engine's loader does with KV-cache scales: rules as data, and a simulation of them."""
