"""Files to rows, rows to examples: reading, tokenising, and where the loss falls."""
