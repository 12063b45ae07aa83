"""`foveal view`: a local web page of runs, their curves and their samples. It only reads."""
