"""Published recommendations of clouds and computing centers."""
