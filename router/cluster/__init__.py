"""What routers tell each other, and the settings that they share."""
