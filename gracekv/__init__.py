"""KV-cache compression with one budget for coverage and resolution."""
