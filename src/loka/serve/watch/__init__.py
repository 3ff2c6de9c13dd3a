"""What a server notices as it answers: inputs that moved, and how far high precision would be."""
