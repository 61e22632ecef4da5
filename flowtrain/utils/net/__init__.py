"""Whatever is a server or a client."""
