"""Checks of the family software: releases that fit together or do not."""
