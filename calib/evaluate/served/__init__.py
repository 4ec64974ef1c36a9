"""A model that a running server has: asked over HTTP, compared with our runtime, its cache watched."""
