"""A shop that fulfils orders, a bank, and a demo that kills them while they work."""
