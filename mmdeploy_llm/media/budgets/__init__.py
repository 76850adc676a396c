"""Bounds the tokens of media items: the budgets of an engine, a prompt or an item."""
