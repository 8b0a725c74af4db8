"""The service on Ray Serve. Nothing here is imported unless --ray is given."""
