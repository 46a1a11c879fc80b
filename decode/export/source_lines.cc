#include "decode/export/source_lines.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <unordered_map>

#include <dwarf.h>
#include <elfutils/libdw.h>
#include <fcntl.h>
#include <unistd.h>

namespace vtrace {
namespace {

class FileNumbers {
  public:
    explicit FileNumbers(std::vector<std::string>& files) : files_(files) {}
    uint32_t of(const char* name, const char* folder) {
        std::string path = name;
        if (path.front() != '/' && folder)
            path = std::string(folder) + "/" + path;
        auto [known, fresh] = numbers_.emplace(path, static_cast<uint32_t>(files_.size()));
        if (fresh)
            files_.push_back(path);
        return known->second;
    }

  private:
    std::vector<std::string>& files_;
    std::unordered_map<std::string, uint32_t> numbers_;
};

const char* folder_of(Dwarf_Die* unit) {
    Dwarf_Attribute attribute;
    return dwarf_formstring(dwarf_attr(unit, DW_AT_comp_dir, &attribute));
}

void add_rows(Dwarf_Die* unit, FileNumbers& files, std::vector<SourceLines::Row>& rows) {
    Dwarf_Lines* lines = nullptr;
    size_t count = 0;
    if (dwarf_getsrclines(unit, &lines, &count) != 0)
        return;
    const char* folder = folder_of(unit);
    for (size_t i = 0; i < count; ++i) {
        Dwarf_Line* line = dwarf_onesrcline(lines, i);
        Dwarf_Addr address = 0;
        int number = 0;
        bool end = false;
        const char* name = dwarf_linesrc(line, nullptr, nullptr);
        if (dwarf_lineaddr(line, &address) != 0 || dwarf_lineno(line, &number) != 0 ||
            dwarf_lineendsequence(line, &end) != 0)
            continue;
        if (end || number <= 0 || !name || !*name)
            rows.push_back({address, 0, 0});
        else
            rows.push_back({address, files.of(name, folder), static_cast<uint32_t>(number)});
    }
}

struct FunctionsOfUnit {
    FileNumbers& files;
    const char* folder;
    std::vector<SourceLines::Function>& functions;
};

int add_function(Dwarf_Die* die, void* argument) {
    auto& unit = *static_cast<FunctionsOfUnit*>(argument);
    Dwarf_Addr address = 0;
    int line = 0;
    const char* name = dwarf_diename(die);
    const char* file = dwarf_decl_file(die);
    if (name && *name && file && *file && dwarf_decl_line(die, &line) == 0 && line > 0 &&
        dwarf_entrypc(die, &address) == 0)
        unit.functions.push_back({address, name, unit.files.of(file, unit.folder), static_cast<uint32_t>(line)});
    return DWARF_CB_OK;
}

} // namespace

Result<SourceLines> SourceLines::read(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return fail("cannot read source lines out of '{}': {}", path, errno_text(errno));
    const std::unique_ptr<Dwarf, int (*)(Dwarf*)> dwarf(dwarf_begin(file, DWARF_C_READ), dwarf_end);
    if (!dwarf) {
        const std::string why = dwarf_errmsg(-1);
        ::close(file);
        return fail("cannot read source lines out of '{}': {}; compile with -g, or name a file with debug information",
                    path, why);
    }
    SourceLines result;
    FileNumbers files(result.files);
    Dwarf_CU* unit = nullptr;
    Dwarf_Die die, other;
    while (dwarf_get_units(dwarf.get(), unit, &unit, nullptr, nullptr, &die, &other) == 0) {
        add_rows(&die, files, result.rows);
        FunctionsOfUnit functions{files, folder_of(&die), result.functions};
        dwarf_getfuncs(&die, add_function, &functions, 0);
    }
    ::close(file);
    // Where one stretch of code ends and another begins at the same address, the end comes first.
    std::stable_sort(result.rows.begin(), result.rows.end(), [](const Row& a, const Row& b) {
        return a.address != b.address ? a.address < b.address : (a.line == 0) > (b.line == 0);
    });
    std::stable_sort(result.functions.begin(), result.functions.end(),
                     [](const Function& a, const Function& b) { return a.address < b.address; });
    if (result.rows.empty())
        return fail("cannot read source lines out of '{}': its debug information has none", path);
    return result;
}

} // namespace vtrace
