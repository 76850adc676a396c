"""Opens documents and makes an item of each page, with an id of its own: for `read`, and for
`caption --by-page`."""
