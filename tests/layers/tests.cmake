# layers/: tests of the folder of the same name
