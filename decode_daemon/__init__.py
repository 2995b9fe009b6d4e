"""The anchor leg: landing slots, receiver, engine and token stream of a daemon that decodes one request at a time."""
