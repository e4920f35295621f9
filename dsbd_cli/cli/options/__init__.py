"""Options: their declaration, the sources of their values, and the settings made of them."""
