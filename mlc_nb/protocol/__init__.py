"""What goes in and out: requests, responses, configuration and chat templates."""
