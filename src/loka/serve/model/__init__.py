"""What a user's model must be to be served, and the copy of it that a server owns."""
