"""Methods side by side on the user's models and data. The table of methods and the sweep need no torch."""
