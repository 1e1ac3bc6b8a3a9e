// RUN: %opt %s -p eliminate | %filecheck %s
// RUN: %opt %s -p eliminate --print-op-generic | %iree-opt - > /dev/null

// Systems of two cells share their loops: each lane has its own pivot, and rows are exchanged by
// scalars, where a pivot is not the row that is due.

// CHECK-LABEL: func.func @vectors
func.func @vectors(%a: memref<9x9x2xf64>, %b: memref<9x3x2xf64>) {
  // CHECK: scf.for [[K:%.+]] = {{.*}}
  // CHECK:   vector.load %a[[[K]], [[K]], {{.*}}] : memref<9x9x2xf64>, vector<2xf64>
  // CHECK:   scf.for [[R:%.+]] = {{.*}} iter_args({{.*}}) -> (vector<2xf64>, vector<2xf64>)
  // CHECK:     "arith.cmpf"({{.*}}) <{predicate = 2 : i64
  // CHECK-COUNT-2: "arith.select"
  // CHECK-COUNT-2: arith.fptosi {{.*}} : f64 to i64
  // CHECK:   arith.ori
  // CHECK-NEXT: scf.if
  // CHECK:     memref.store {{.*}}, %a[{{.*}}] : memref<9x9x2xf64>
  // CHECK:     memref.store {{.*}}, %b[{{.*}}] : memref<9x3x2xf64>
  // CHECK:   arith.divf {{.*}} : vector<2xf64>
  // CHECK:     vector.store {{.*}}, %a[{{.*}}] : memref<9x9x2xf64>, vector<2xf64>
  // CHECK:     vector.store {{.*}}, %b[{{.*}}] : memref<9x3x2xf64>, vector<2xf64>
  // CHECK: scf.for
  // CHECK:   arith.divf {{.*}} : vector<2xf64>
  // CHECK-NOT: dense.solve
  dense.solve %a, %b batch 0 : memref<9x9x2xf64>, memref<9x3x2xf64>
  func.return
}

// There are no vectors of complex numbers: one cell after the other. And a batch is a loop.

// CHECK-LABEL: func.func @scalars
func.func @scalars(%a: memref<5x9x9x2xcomplex<f64>>, %b: memref<5x9x2xcomplex<f64>>) {
  // CHECK: scf.for [[I:%.+]] =
  // CHECK:   scf.for [[LANE:%.+]] =
  // CHECK:     scf.for [[K:%.+]] =
  // CHECK:       memref.load %a[[[I]], [[K]], [[K]], [[LANE]]] : memref<5x9x9x2xcomplex<f64>>
  // CHECK-NOT: vector
  // CHECK:       complex.div
  dense.solve %a, %b batch 1 : memref<5x9x9x2xcomplex<f64>>, memref<5x9x2xcomplex<f64>>
  func.return
}

// The same for each cell.

// CHECK-LABEL: func.func @uniform
func.func @uniform(%a: memref<9x9xf64>, %b: memref<9xf64>) {
  // CHECK: memref.load %a[[[K:%.+]], [[K]]] : memref<9x9xf64>
  // CHECK-NOT: vector
  // CHECK: func.return
  dense.solve %a, %b batch 0 : memref<9x9xf64>, memref<9xf64>
  func.return
}
