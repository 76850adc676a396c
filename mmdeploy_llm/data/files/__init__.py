"""Finds the media of an input, and remembers what it passed over.

find_media(paths, options) --> Found   files     in order, each with its kind and its id
                                       skipped   what is not read, each with its reason
  walk.py     folders and globs: names that are left out, links, what is no regular file
  names.py    names of systems that are left out; the patterns of --exclude
  kinds.py    what a file is, by its first bytes
  animations.py   whether an image has several frames
  chosen_kinds.py which kinds become items
  counting.py how many files there are, for a first line, before any is looked at
  skipped.py  what was passed over, counted and written to a file

options.py holds what callers choose; contents.py and duplicates.py find items that ask the same.
"""
