"""Checks of the family software: compatibility of installed releases."""
