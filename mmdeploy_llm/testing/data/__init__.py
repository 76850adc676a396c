"""Checks of what reads corpora and of what writes outputs, each by functions that say what to
do."""
