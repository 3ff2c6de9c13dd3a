"""Files from which a run resumes bit for bit."""
