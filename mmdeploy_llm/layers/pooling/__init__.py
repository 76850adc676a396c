"""Makes vectors and scores of the last hidden states.

rules.py            what a model's folder says of its vectors and of pairs
sentence_folder.py  reads it from a folder of sentence-transformers
heads.py            fits a model to a checkpoint without an output head, or with one of labels
pooler.py           pools hidden states, step by step
abilities.py        what a loaded model can give, from its optional attributes
"""
