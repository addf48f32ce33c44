"""Statistics over ranks: majorities, outliers, trends and deviations from a baseline."""
