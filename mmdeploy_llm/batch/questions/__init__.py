"""Several questions about one item of a batch, and answers of a shape that a schema gives.

asks.py       Asks: the questions by name, and the system message
gathering.py  Gathering: the answers to an item's questions become one record
"""
