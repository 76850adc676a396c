"""The HTML report of a batch, which a browser shows without a network.

page.py      the page: its header, its cards, and the files of a large report
pictures.py  the pictures of the cards, embedded or in files
target.py    checks the file that a report is written to
previews.py  makes small pictures of media
letters.py   the language of a text, and what reorders the text around it
"""
