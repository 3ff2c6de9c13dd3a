"""Sites are right in every use: converted models against an oracle that shares no mechanism with them."""
