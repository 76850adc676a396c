"""Makes vectors and scores of the last hidden states.

rules.py      what a model's folder says of its vectors and of pairs
abilities.py  what a loaded model can give, from its optional attributes
"""
