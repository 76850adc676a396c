"""Room 1, accepts: words and media of any form to a Request."""
