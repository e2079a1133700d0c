# launch/: tests of the folder of the same name
gatefold_test(options SOURCES launch/options_test.cpp)
gatefold_test(report SOURCES launch/report_test.cpp)
