"""What a verifier gets wrong, on labelled completions and on completions that deserve nothing."""
