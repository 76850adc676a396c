"""What plugin authors test with; may import anything, and nothing imports it."""
