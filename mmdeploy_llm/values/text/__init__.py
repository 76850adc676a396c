"""How values are written for people, and how words of users are understood."""
