"""How others add to healthcheck: the hook specification, loading plugins, what they have registered, calling them."""
