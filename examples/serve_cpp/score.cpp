// Loads a package that `server.package(path)` wrote, scores rows and compares with what the server answered.
//
//     score PACKAGE ROWS INPUTS [MOST [WEIGHTS]]
//
// ROWS: torch.save of a list of tensors, INPUTS inputs and then the outputs. WEIGHTS: what `server.package_weights` wrote
// for the package, which then computes with these.
//
// Neither Python nor loka runs here. Tensors lie where the package computes. Exit status 0: every output has the
// server's dtype and shape, is finite where the server's is, somewhere at least, and within MOST of it, 1e-3 if it is
// not said. 1: one is not, and it is said which. 2: the package or the rows cannot be read or run.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

// The largest difference where both are finite, and why the two are no answers to the same rows, or nothing.
double difference(const torch::Tensor& found, const torch::Tensor& expected, std::string& why) {
  std::ostringstream text;
  if (found.dtype() != expected.dtype() || found.sizes() != expected.sizes()) {
    text << found.dtype() << " " << found.sizes() << ", the server's " << expected.dtype() << " " << expected.sizes();
    why = text.str();
    return 0;
  }
  if (found.numel() == 0) return 0;
  const auto real = [](const torch::Tensor& x) {
    return (x.is_complex() ? torch::view_as_real(x.resolve_conj()) : x).to(torch::kCPU, torch::kDouble);
  };
  const auto one = real(found), other = real(expected);
  const auto finite = one.isfinite();
  const auto unlike = (finite != other.isfinite()).sum().item<int64_t>();
  if (unlike) text << unlike << " of " << one.numel() << " entries are finite in one of the two only";
  else if (!finite.any().item<bool>()) text << "no entry is finite, which proves nothing";
  why = text.str();
  return why.empty() ? (one - other).masked_select(finite).abs().max().item<double>() : 0;
}

torch::IValue read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot open ") + path);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return torch::pickle_load(bytes);
}

// Other threads may call the package meanwhile: it copies them beside those that it has, and then exchanges the two.
void take_weights(torch::inductor::AOTIModelPackageLoader& model, const char* path, const torch::Device& device) {
  std::unordered_map<std::string, torch::Tensor> weights;
  for (const auto& one : read(path).toGenericDict())
    weights.emplace(one.key().toStringRef(), one.value().toTensor().to(device));
  model.load_constants(weights, /*use_inactive=*/true, /*check_full_update=*/true);
  model.get_runner()->swap_constant_buffer();
}

int compare(int count, char** arguments) {
  c10::InferenceMode mode;
  const auto held = read(arguments[2]).toList();
  const size_t inputs = std::stoul(arguments[3]);
  const double most = count > 4 ? std::stod(arguments[4]) : 1e-3;
  if (inputs == 0 || inputs >= held.size()) throw std::runtime_error("INPUTS leaves no input, or no output, of ROWS");
  std::vector<torch::Tensor> given;
  for (size_t place = 0; place < inputs; ++place) given.push_back(held.get(place).toTensor());

  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  if (count > 5) take_weights(model, arguments[5], given[0].device());
  const std::vector<torch::Tensor> found = model.run(given);
  if (found.size() != held.size() - inputs) {
    std::cerr << "the package returns " << found.size() << " outputs, ROWS holds " << held.size() - inputs << "\n";
    return 1;
  }
  double apart = 0;
  bool same = true;
  for (size_t place = 0; place < found.size(); ++place) {
    std::string why;
    const double each = difference(found[place], held.get(inputs + place).toTensor(), why);
    if (!why.empty()) std::cerr << "output " << place << ": " << why << "\n";
    same = same && why.empty();
    apart = std::max(apart, each);
  }
  if (!same) return 1;
  std::cout << given[0].size(0) << " rows, " << found.size() << " outputs, largest difference " << apart << "\n";
  return apart <= most ? 0 : 1;  // `apart` is no NaN: it is of finite numbers alone
}

int main(int count, char** arguments) {
  if (count < 4 || count > 6) {
    std::cerr << "score PACKAGE ROWS INPUTS [MOST [WEIGHTS]]\n";
    return 2;
  }
  try {
    return compare(count, arguments);
  } catch (const std::exception& error) {
    const std::string text = error.what();  // of torch with a trace of C++ behind its first line
    std::cerr << "score: " << text.substr(0, text.find('\n')) << "\n";
    return 2;
  }
}
