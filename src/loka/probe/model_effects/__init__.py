"""What quantizing each site would cost the model in KL/H, from extra backward passes."""
