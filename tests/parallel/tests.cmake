# parallel/: tests of the folder of the same name
