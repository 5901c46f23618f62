"""What one decoder layer sees, and what it computes of it."""
