"""The indexing job spread over a Ray cluster. Only the driver writes the store; nothing here is imported unless --ray is given."""
