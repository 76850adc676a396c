"""Writes answers into small text files beside the pictures they describe, as trainers read them.

options.py   SidecarOptions: the suffix, what happens to a file that is there, the text
text.py      the text of a sidecar, from a record: template, trigger words, one line
places.py    where a sidecar goes: beneath the input's folders, through no link, of one picture only
writer.py    Sidecars: writes them, fills in missing ones, and counts
run.py       those of one run, written after its records
"""
