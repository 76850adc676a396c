"""Room 1 accepts: text and media of any form become a Request."""
