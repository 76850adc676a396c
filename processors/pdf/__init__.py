"""PDF documents, whose pages are images. A page is drawn at the size at which the model sees it, in
a process that may die: hostile files crash PDFium, and it may not be used by two threads at once.
"""
