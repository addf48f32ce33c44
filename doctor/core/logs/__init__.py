"""Log events as the check runner uses them."""
