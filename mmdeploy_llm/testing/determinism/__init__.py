"""Shows on this machine that answers do not depend on what is computed beside them."""
