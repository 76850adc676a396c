"""Holds what a batch keeps of its items: results, ids, digests, and the files beside an output.

item.py           Item: one prompt of a batch; Media: one media item of it
record.py         Record: the result of an item, one line of JSON
ids.py            compact sets of ids, and the selection of a shard's lines
identity.py       digests of inputs, files and models: what has changed since
configuration.py  the options that decided the answers, in a file beside the output
state.py          how far the last run has come, in a file beside the output
files.py          files that are written whole or not at all, and only where they are expected
growing.py       a file that one run extends, compared with what the run has written
columns.py        the columns of a table of records: answers, carried columns, each with a kind
boxes.py          boxes that answers about pictures have
media.py          the first image or video of an item, as bytes
outcome.py        whether an item has its answer, and if not, what it has instead
shelves.py        where complete parts of an output are: a folder, or a URL
template.py       texts with columns in them
unicode_text.py   texts with lone surrogates, such as names of files that are not UTF-8
"""
