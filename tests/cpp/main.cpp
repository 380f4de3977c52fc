#include <cstdio>
#include <cstdlib>
#include <map>

#include "check.h"

namespace infinilm::test {

namespace {
std::map<std::string, void (*)(int)>& tests() {
    static std::map<std::string, void (*)(int)> all;
    return all;
}
}  // namespace

Registered::Registered(const char* name, void (*run)(int)) { tests()[name] = run; }

}  // namespace infinilm::test

int main(int argc, char** argv) {
    using namespace infinilm::test;
    std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what a test that hangs has printed is there
    const auto found = argc > 1 ? tests().find(argv[1]) : tests().end();
    if (found == tests().end()) {
        for (const auto& [name, run] : tests()) std::printf("%s\n", name.c_str());
        return argc > 1 ? 2 : 0;
    }
    try {
        found->second(argc > 2 ? std::atoi(argv[2]) : 0);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
        return 1;
    }
    std::printf("%s: ok\n", argv[1]);
}
